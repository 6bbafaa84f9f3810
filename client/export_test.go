package client

// DecodePull reads the stream of a pull.
var DecodePull = decodePull
