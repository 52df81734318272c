"""The methods: generators of requests that read like their papers."""
