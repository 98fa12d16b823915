"""Scripts that make what recipes read: unpacked images, features, small pretrained nets."""
