"""Export: a trained model written for other software, verified against our own logits, and never half."""
