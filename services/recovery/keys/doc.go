// Package keys owns the list of signing keys that people see, their requests for rotation, and the incidents about keys
// that a replica lacks.
//
// Package keyset owns the set of keys: the service that signs with a kind makes its keys and drives their states. This
// package only records a rotation.
package keys
