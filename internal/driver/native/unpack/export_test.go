package unpack

// DecodeAnswer reads what the process says at its end.
var DecodeAnswer = decodeAnswer
