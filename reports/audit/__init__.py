"""Arithmetic checks on any table of results of distributed training: do the printed numbers agree?"""
