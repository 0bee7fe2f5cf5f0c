"""Writes the small model with an output layer of its own: untied.py FOLDER"""

from __future__ import annotations

import sys

import torch

from agent_rl import small_model
from agent_rl.engine.loading import load_model, load_tokenizer

model = load_model(small_model(), device=torch.device("cpu"), dtype=torch.float32)
model.config.tie_word_embeddings = False
model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())
model.save_pretrained(sys.argv[1])
load_tokenizer(small_model()).save_pretrained(sys.argv[1])
