// Package keyset keeps the signing keys of the mesh: which keys each kind has, which one signs, which replicas hold
// them, and how one follows another.
//
// The set is stored in Postgres, in the tables mesh.signing_key, mesh.key_rotation and mesh.key_replica: names, public
// halves and states of keys, never a private one. Private keys are files of the service that signs. A Set is one
// replica's view of it. It reads the directories and the tables every PollEvery and follows both without a restart.
//
// A key goes through four states. It is made as verify_only; it signs once each live replica that takes part in its
// kind holds it, and every other verifier of its signatures has received it; the key before it then only verifies
// (verifying_after), and is retired when nothing that it signed is outstanding. The service that signs drives the
// states of its kind, each change in one transaction with its audit entry.
//
// A Set trusts the files that it was given. A key that is only in the table is trusted if a trusted key has endorsed
// it, so that a role that may write the table cannot thereby sign. Guarantees: no key signs that a replica could not
// verify when it last reported; a replica whose files differ from the set does not start; a file that is bad is
// refused, and the keys that were loaded before stay in use.
package keyset
