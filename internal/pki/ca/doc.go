// Package ca owns the two authorities of a mesh.
//
// The node authority is smallstep's, embedded (Embedded) or as a step-ca process (Remote), behind the one interface
// Signer. It signs nothing but node certificates, and only on a one-time token that this package mints for that one
// request: the token is bound to the request's digest, lives two minutes and has a random id, since the authority marks
// a token as used before it verifies it and before its answer arrives. This package does not decide who may have a
// certificate: recovery decides, and then calls Sign.
//
// The service authority (ServiceCA) issues the certificates by which services authenticate each other. It has a root of
// its own: even a compromised node authority cannot make a node pass for a service.
//
// Guarantees: a node's certificate carries exactly one URI name, client authentication only, a life no longer than
// requested, and the private extension that the template adds. A request that asks for anything else is refused before
// a token is minted. Renewal at the authority itself is disabled: every certificate is issued through recovery. Keys
// and roots are created once, under a file lock, with mode 0600, so that replicas may share the directory. A root that
// is missing from a directory with other files of its authority is not made anew: Open and OpenServiceCA refuse.
package ca
