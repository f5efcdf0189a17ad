// Package caller reads the projections in the scope of the person behind a call.
//
// It decides what a call may read by the person alone: the scope, whether the request is for people of the operator,
// and at which position of the events a read takes place. It authenticates no person, which package people does, and
// knows no server.
package caller
