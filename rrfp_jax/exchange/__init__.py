"""Models in the form of Hugging Face, in and out: a folder with ``config.json`` and safetensors files.

Tables say which of their tensors is which array of ours, one file per family in ``families``; everything else goes by
these tables, layer by layer, and never holds a model. What our models cannot express is refused by the name of the
field, and no tensor is left over, on either side.
"""
