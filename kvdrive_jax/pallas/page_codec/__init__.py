"""Pages as rows of bytes with int8 or int4 codes, and back."""

from kvdrive_jax.pallas.page_codec.reference import decode_pages, encode_pages

__all__ = ["decode_pages", "encode_pages"]
