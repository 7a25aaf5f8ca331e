"""What clients and the server make out of data and models: synthetic images, representatives, distilled models."""
