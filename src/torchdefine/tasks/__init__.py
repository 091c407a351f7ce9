"""What models are trained to do: each task with its data, model, decoding and programs in a folder of its own."""
