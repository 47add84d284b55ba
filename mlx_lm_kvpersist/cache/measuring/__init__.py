"""What is measured of a loaded model, once: precision, attention plans, prefill memory."""
