"""The vocabulary of the bundled models: 64 emoji that are hard to confuse, and their attributes.

Plain tables. Nothing here knows how a scene is drawn or described.
"""

from __future__ import annotations

__all__ = ["BACKGROUNDS", "MOTIONS", "POSITIONS", "SIZES", "SUBJECTS"]

SUBJECTS: dict[str, str] = {
    # animals
    "cat": "\U0001f431",
    "panda": "\U0001f43c",
    "fox": "\U0001f98a",
    "frog": "\U0001f438",
    "pig": "\U0001f437",
    "lion": "\U0001f981",
    "koala": "\U0001f428",
    "penguin": "\U0001f427",
    "owl": "\U0001f989",
    "elephant": "\U0001f418",
    "whale": "\U0001f433",
    "octopus": "\U0001f419",
    "turtle": "\U0001f422",
    "snail": "\U0001f40c",
    "bee": "\U0001f41d",
    "ladybug": "\U0001f41e",
    "butterfly": "\U0001f98b",
    "crab": "\U0001f980",
    # plants
    "rose": "\U0001f339",
    "sunflower": "\U0001f33b",
    "cactus": "\U0001f335",
    "mushroom": "\U0001f344",
    "palm tree": "\U0001f334",
    "clover": "\U0001f340",
    # food
    "apple": "\U0001f34e",
    "banana": "\U0001f34c",
    "lemon": "\U0001f34b",
    "grapes": "\U0001f347",
    "watermelon": "\U0001f349",
    "strawberry": "\U0001f353",
    "pineapple": "\U0001f34d",
    "carrot": "\U0001f955",
    "avocado": "\U0001f951",
    "pizza": "\U0001f355",
    "burger": "\U0001f354",
    "donut": "\U0001f369",
    "ice cream": "\U0001f366",
    "fried egg": "\U0001f373",
    # objects
    "soccer ball": "\u26bd",
    "basketball": "\U0001f3c0",
    "car": "\U0001f697",
    "rocket": "\U0001f680",
    "sailboat": "\u26f5",
    "guitar": "\U0001f3b8",
    "balloon": "\U0001f388",
    "gift": "\U0001f381",
    "umbrella": "\u2614",
    "key": "\U0001f511",
    "bell": "\U0001f514",
    "clock": "\u23f0",
    "crown": "\U0001f451",
    "camera": "\U0001f4f7",
    "house": "\U0001f3e0",
    "top hat": "\U0001f3a9",
    "gem": "\U0001f48e",
    # sky and faces
    "star": "\u2b50",
    "moon": "\U0001f319",
    "fire": "\U0001f525",
    "snowman": "\u26c4",
    "rainbow": "\U0001f308",
    "smile": "\U0001f600",
    "robot": "\U0001f916",
    "ghost": "\U0001f47b",
    "alien": "\U0001f47d",
}

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (248, 248, 248),
    "black": (24, 24, 28),
    "gray": (136, 136, 140),
    "red": (206, 54, 54),
    "green": (52, 150, 72),
    "blue": (58, 96, 206),
    "yellow": (246, 214, 84),
    "purple": (140, 70, 176),
}

# Side of the subject as a fraction of the canvas.
SIZES: dict[str, float] = {"small": 0.46, "large": 0.7}

# Where the centre goes: (x, y) in [-1, 1] of the space that the subject leaves free.
POSITIONS: dict[str, tuple[float, float]] = {
    "center": (0.0, 0.0),
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "top": (0.0, -1.0),
    "bottom": (0.0, 1.0),
}

MOTIONS: tuple[str, ...] = (
    "moving left",
    "moving right",
    "moving up",
    "moving down",
    "spinning",
    "bouncing",
    "growing",
    "shrinking",
)
