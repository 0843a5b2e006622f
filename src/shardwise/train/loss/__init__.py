"""The loss of a step: exact means over tokens, and losses that never hold all logits.

weights.py    what a micro-batch weighs in its step, and in an evaluation
causal.py     the loss of causal models of transformers, switched on for a model
lazy.py       what such a model's forward finds in place of its logits
chunked.py    cross-entropy of a linear head, a chunk of rows at a time
"""
