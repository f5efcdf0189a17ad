-- +goose Up

-- Which replicas of a service are at work. A row is written by its own service alone, once a beat and in place, and read by those who judge by beats.
CREATE TABLE mesh.replica (
    service         text        NOT NULL,
    replica_id      uuid        PRIMARY KEY,
    address         text        NOT NULL DEFAULT '', -- where other services reach it
    started_at      timestamptz NOT NULL,
    beat_at         timestamptz NOT NULL,
    listening_since timestamptz NOT NULL, -- since when some replica of the service has beaten without a gap, as of this one's beat
    sessions        integer     NOT NULL DEFAULT 0,
    late            integer     NOT NULL DEFAULT 0,
    leaving         boolean     NOT NULL DEFAULT false,
    version         bigint      NOT NULL
) WITH (fillfactor = 50);

GRANT SELECT ON mesh.replica TO nodeapi, lifecycle, recovery, readmodel;
GRANT INSERT, UPDATE, DELETE ON mesh.replica TO nodeapi;
ALTER TABLE mesh.replica ENABLE ROW LEVEL SECURITY;
CREATE POLICY readable ON mesh.replica FOR SELECT USING (true);
CREATE POLICY own_row ON mesh.replica FOR INSERT WITH CHECK (service = current_user::text);
CREATE POLICY own_change ON mesh.replica FOR UPDATE USING (service = current_user::text);
CREATE POLICY own_end ON mesh.replica FOR DELETE USING (service = current_user::text);

INSERT INTO mesh.replica (service, replica_id, address, started_at, beat_at, listening_since, sessions, late, leaving, version)
SELECT 'nodeapi', n.replica_id, COALESCE(s.address, ''), n.started_at, n.beat_at, COALESCE(l.since, n.started_at), n.sessions, n.late, n.leaving, n.version
FROM nodeapi.replica n LEFT JOIN lifecycle.replica_seen s USING (replica_id) LEFT JOIN recovery.watch_listening l ON true;

-- The tables in which each service kept beats that came as events (lifecycle.replica_seen, nodeapi.replica, readmodel.replica, recovery.watch_replica and
-- recovery.watch_listening) are not used any more. They stay as they are until no build that reads them can be gone back to.

-- +goose Down
DROP TABLE mesh.replica;
