"""A model as an endpoint in OpenAI's form: engines that answer, and the pages that ask them."""
