"""Images, sounds, videos and documents of requests: fetched safely, decoded, and prepared for
encoders.
"""
