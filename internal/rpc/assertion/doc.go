// Package assertion signs and verifies on whose behalf a service calls another. The assertion of a person is good for
// one request, for a minute, once; its verifier has the public keys of readmodel.
//
// It does not decide which methods need a person, nor what a person may do: package guard and the owners do.
package assertion
