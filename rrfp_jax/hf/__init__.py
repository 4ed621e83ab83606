"""Models in the form of Hugging Face, in and out: a folder with ``config.json`` and safetensors files.

``importing.py`` and ``exporting.py`` are the two ways. Tables map every array of ours to tensors of theirs
(``decoders.py`` shows them, and how to add a family); both ways go by these tables, layer by layer, and never hold a
whole model. A field that our models cannot express is refused by its name, and no tensor is left over on either side.
"""
