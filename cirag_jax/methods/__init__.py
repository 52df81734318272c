"""The methods, each a generator of requests that reads like its paper."""
