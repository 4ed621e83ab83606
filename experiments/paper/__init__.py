"""The evaluation: one module per question, whose rows anybody can measure again, and a report made of rows alone.

``python -m experiments.paper run`` measures, ``python -m experiments.paper report`` writes tables, pictures and text.
"""
