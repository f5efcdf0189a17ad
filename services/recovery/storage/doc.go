// Package storage measures the size of the database against its limit, and opens an incident before the limit is
// reached.
//
// It owns mesh.storage_sample, which readmodel shows, and the incident of kind `storage`. It takes the size from the
// database, the limit from the policy (storage.limit_mebibytes), and the free space of the database's volume from the
// kernel if the configuration names a directory of that volume (database_volume). Without either limit it only records
// the size. It deletes nothing but its own samples.
package storage
