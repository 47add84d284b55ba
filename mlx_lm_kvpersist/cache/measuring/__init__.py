"""What is measured when a model is loaded: precision, attention plans, prefill memory."""
