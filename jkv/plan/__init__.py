"""What a model needs and may reach on a machine that need not be there: `python -m jkv.plan`."""
