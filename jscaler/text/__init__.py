"""Text for people: tables, and how bytes and seconds read. Reads no other package."""
