"""Private fine-tuning on images, features, videos and texts: arms, tuned on a public split."""
