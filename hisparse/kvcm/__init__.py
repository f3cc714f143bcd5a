"""A manager for caches that many servers share, with the interface of Tair KVCache Manager.

https://github.com/alibaba/tair-kvcache, commit f6aa2b2: the same messages over gRPC and HTTP.
"""
