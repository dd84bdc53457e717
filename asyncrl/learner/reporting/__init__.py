"""What a training step tells: its series, and the warnings that follow from them."""
