"""Files as such: mapped for reading, written whole or not at all, their digests."""
