"""The package's dimension letters, as they stand in annotations and in suffixes of names (`q_BHLE`).

B batch (sequences), L text (positions), K latents, D width, H heads, E width of a head, V vocabulary (the mask token
included), N rows: (sequence, position) pairs taken out of a batch and laid flat, row = b * L + l.
"""
