"""The parts of train_gpt.py: model, text, options, comparison with unsharded training, report."""
