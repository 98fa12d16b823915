"""The laboratory: everything that reproduces a paper with `tacit`. A folder per paper; none of it is in the package.

python -m studies list
python -m studies run dp_tta/dp-tta.toml [--out DIR]
python -m studies tables DIR dp_tta/dp-tta.toml
"""
