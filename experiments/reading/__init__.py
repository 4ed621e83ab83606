"""A demonstration: a small vision-language model learns to read words in pictures.

:mod:`experiments.reading.draw` draws the words and writes them as samples of text with images, the form in which
``rrfp train`` takes anybody's own images (data of kind ``image_text``). ``python -m experiments.reading`` has a trained
run read words that it has never seen. ``make train-multimodal`` does both, with the preset ``cpu/multimodal``.
"""
