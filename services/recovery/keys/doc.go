// Package keys owns what people see of the signing keys and ask about them, and the incidents about keys that a replica lacks.
//
// The set is package keyset's: the service that signs with a kind makes its keys and drives their states. Here a rotation is only written down.
package keys
