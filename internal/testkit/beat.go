package testkit

import "time"

// Beat writes a row of mesh.replica as if a replica of nodeapi had beaten at a time from now by the database's clock.
func Beat(d *Database, replicaID, address string, from time.Duration, leaving bool) {
	d.t.Helper()
	_, err := d.OwnerPool().Exec(Context(d.t), `
		INSERT INTO mesh.replica (service, replica_id, address, started_at, beat_at, listening_since, leaving, version)
		SELECT 'nodeapi', $1, $2, c.at, c.at, c.at, $4, 1 FROM (SELECT mesh.clock() + $3::interval AS at) c
		ON CONFLICT (replica_id) DO UPDATE
			SET address = excluded.address, beat_at = excluded.beat_at, leaving = excluded.leaving`,
		replicaID, address, from, leaving)
	if err != nil {
		d.t.Fatalf("write a beat: %v", err)
	}
}

// BeatSince writes the row of a replica of nodeapi that beats now and began at a time.
func BeatSince(d *Database, replicaID string, started time.Time, leaving bool) {
	d.t.Helper()
	Beat(d, replicaID, "", 0, leaving)
	if _, err := d.OwnerPool().Exec(Context(d.t), `UPDATE mesh.replica SET started_at = $2 WHERE replica_id = $1`,
		replicaID, started); err != nil {
		d.t.Fatalf("date the start of a replica: %v", err)
	}
}
