"""The CPU kernel: C++ compiled on the user's machine at first use, and its loader."""
