"""A dataset where it lies: its files fetched and checked, its numbers, its samples one by one."""
