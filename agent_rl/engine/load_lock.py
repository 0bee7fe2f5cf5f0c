"""One model is loaded at a time.

While transformers loads a model it replaces functions of its own for the whole process. Two loads
that overlap would put the replacement back for good, and no later model would tie its weights.
"""

from __future__ import annotations

import threading

loading = threading.Lock()
