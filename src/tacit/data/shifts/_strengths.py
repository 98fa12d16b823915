"""How strong each shift is, from severity 1 to 5. Lengths are pixels of a 32 x 32 image.

Graded on Fashion-MNIST by the accuracy of a source model without any adaptation, and by eye: `docs/shifts.md`
has the table. Streams and results depend on these numbers, so they do not change between versions.
"""

STRENGTHS: dict[str, tuple[tuple[float, ...], ...]] = {
    # standard deviation
    "gaussian_noise": ((0.05,), (0.08,), (0.12,), (0.15,), (0.19,)),
    # photons of a white pixel
    "shot_noise": ((60,), (25,), (12,), (7,), (4,)),
    # share of values
    "impulse_noise": ((0.02,), (0.04,), (0.08,), (0.12,), (0.17,)),
    # radius
    "defocus_blur": ((1.0,), (1.6,), (2.4,), (3.0,), (3.7,)),
    # blur, reach, chance of a swap
    "glass_blur": ((0.5, 1, 0.04), (0.5, 1, 0.09), (0.6, 1, 0.16), (0.7, 1, 0.23), (0.8, 1, 0.32)),
    # length
    "motion_blur": ((2.5,), (3.5,), (5.0,), (6.5,), (8.5,)),
    # largest magnification
    "zoom_blur": ((1.12,), (1.3,), (1.5,), (1.7,), (1.95,)),
    # share of flakes, veil
    "snow": ((0.02, 0.02), (0.03, 0.06), (0.045, 0.1), (0.06, 0.15), (0.08, 0.22)),
    # picture, ice
    "frost": ((1.0, 0.07), (0.95, 0.12), (0.9, 0.18), (0.85, 0.27), (0.8, 0.4)),
    # strength, decay of octaves
    "fog": ((0.06, 0.35), (0.12, 0.35), (0.2, 0.4), (0.33, 0.45), (0.55, 0.5)),
    # lift
    "brightness": ((0.03,), (0.05,), (0.08,), (0.14,), (0.22,)),
    # factor
    "contrast": ((0.9,), (0.82,), (0.73,), (0.58,), (0.4,)),
    # stretch, width
    "elastic_transform": ((0.9, 3.4), (1.3, 3.3), (1.7, 3.2), (2.1, 3.0), (2.5, 2.8)),
    # side of a block
    "pixelate": ((1.5,), (2.0,), (2.6,), (3.4,), (4.3,)),
    # quality
    "jpeg_compression": ((25,), (14,), (8,), (5,), (3,)),
    # standard deviation
    "speckle_noise": ((0.2,), (0.3,), (0.45,), (0.6,), (0.8,)),
    # standard deviation
    "gaussian_blur": ((0.6,), (0.9,), (1.3,), (1.7,), (2.2,)),
    # share of drops, opacity
    "spatter": ((0.04, 0.5), (0.07, 0.6), (0.11, 0.7), (0.15, 0.8), (0.2, 0.9)),
    # factor
    "saturate": ((1.5,), (2.0,), (2.8,), (4.0,), (6.0,)),
}
