//! A decode step by pykv-sys: see tests/decode.rs.
