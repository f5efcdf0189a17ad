// Package storage watches how much room the database takes and may take, and opens an incident before it is full.
//
// It owns mesh.storage_sample, which readmodel shows, and the incident of kind `storage`. It believes the database
// about its size, the policy (storage.limit_mebibytes) about what it may grow to, and the kernel about the free space of
// its volume, where the configuration names a directory of that volume (database_volume). Without either it only
// records the size. It deletes nothing but its own samples.
package storage
