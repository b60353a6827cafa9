"""The page: decoding as it happens, in a browser"""
