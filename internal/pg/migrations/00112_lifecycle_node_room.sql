-- +goose Up

-- What each enrolled machine has room for, kept by triggers in the transaction of what changes it, so that a slot is
-- found by a few index entries, however many machines and allocations there are. A row is locked after all others of
-- its transaction.
CREATE TABLE lifecycle.node_room (
    node_id    uuid    PRIMARY KEY,
    -- Admitted, not cordoned, not retired, its disk not full and its session open, at replica_id.
    open       boolean NOT NULL,
    replica_id uuid,
    slots      integer NOT NULL,
    devices    integer NOT NULL,
    used       integer NOT NULL DEFAULT 0, -- allocations that are not released
    held       integer NOT NULL DEFAULT 0, -- GPUs of those
    failed     integer NOT NULL DEFAULT 0, -- of those, whose release has failed
    free       integer NOT NULL GENERATED ALWAYS AS (devices - held) STORED
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);

CREATE INDEX node_room_open ON lifecycle.node_room (replica_id, free, used, node_id) WHERE open AND used < slots AND failed = 0;
CREATE INDEX node_room_devices ON lifecycle.node_room (devices) WHERE open;

-- +goose StatementBegin
CREATE FUNCTION lifecycle.room_of_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO lifecycle.node_room AS r (node_id, open, replica_id, slots, devices, used, held, failed)
    SELECT NEW.node_id,
        NEW.admitted AND NOT NEW.cordoned AND NOT NEW.retired AND NEW.session_open
            AND coalesce(NEW.host->'stateDisk'->>'full', '') <> 'true',
        NEW.replica_id, NEW.slots, jsonb_array_length(coalesce(NEW.host->'gpus', '[]')),
        count(*), coalesce(sum(a.gpus), 0), count(*) FILTER (WHERE a.state = 'release_failed')
    FROM lifecycle.allocation a WHERE a.node_id = NEW.node_id AND a.state <> 'released' AND a.slot IS NOT NULL
    ON CONFLICT (node_id) DO UPDATE
        SET open = EXCLUDED.open, replica_id = EXCLUDED.replica_id, slots = EXCLUDED.slots, devices = EXCLUDED.devices;
    RETURN NULL;
END $$;

CREATE FUNCTION lifecycle.room_of_allocation() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' AND OLD.state <> 'released' THEN
        UPDATE lifecycle.node_room r SET used = r.used - 1, held = r.held - OLD.gpus,
            failed = r.failed - (OLD.state = 'release_failed')::integer
        WHERE r.node_id = OLD.node_id;
    END IF;
    IF TG_OP <> 'DELETE' AND NEW.state <> 'released' THEN
        UPDATE lifecycle.node_room r SET used = r.used + 1, held = r.held + NEW.gpus,
            failed = r.failed + (NEW.state = 'release_failed')::integer
        WHERE r.node_id = NEW.node_id;
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd

CREATE TRIGGER room_of_new_gate AFTER INSERT ON lifecycle.node_gate
    FOR EACH ROW WHEN (NEW.instance_id IS NULL) EXECUTE FUNCTION lifecycle.room_of_gate();
CREATE TRIGGER room_of_gate AFTER UPDATE ON lifecycle.node_gate
    FOR EACH ROW WHEN (NEW.instance_id IS NULL AND (OLD.admitted, OLD.cordoned, OLD.retired, OLD.session_open, OLD.slots, OLD.replica_id, OLD.host)
        IS DISTINCT FROM (NEW.admitted, NEW.cordoned, NEW.retired, NEW.session_open, NEW.slots, NEW.replica_id, NEW.host))
    EXECUTE FUNCTION lifecycle.room_of_gate();
-- Boxes have a node of their own and no slot.
CREATE TRIGGER room_of_new_allocation AFTER INSERT ON lifecycle.allocation
    FOR EACH ROW WHEN (NEW.slot IS NOT NULL) EXECUTE FUNCTION lifecycle.room_of_allocation();
CREATE TRIGGER room_of_allocation AFTER UPDATE ON lifecycle.allocation
    FOR EACH ROW WHEN (NEW.slot IS NOT NULL AND (OLD.state, OLD.node_id, OLD.gpus) IS DISTINCT FROM (NEW.state, NEW.node_id, NEW.gpus))
    EXECUTE FUNCTION lifecycle.room_of_allocation();
CREATE TRIGGER room_of_old_allocation AFTER DELETE ON lifecycle.allocation
    FOR EACH ROW WHEN (OLD.slot IS NOT NULL) EXECUTE FUNCTION lifecycle.room_of_allocation();

INSERT INTO lifecycle.node_room (node_id, open, replica_id, slots, devices, used, held, failed)
SELECT g.node_id, g.admitted AND NOT g.cordoned AND NOT g.retired AND g.session_open AND coalesce(g.host->'stateDisk'->>'full', '') <> 'true',
    g.replica_id, g.slots, jsonb_array_length(coalesce(g.host->'gpus', '[]')), coalesce(a.used, 0), coalesce(a.held, 0), coalesce(a.failed, 0)
FROM lifecycle.node_gate g LEFT JOIN (
    SELECT node_id, count(*) AS used, sum(gpus) AS held, count(*) FILTER (WHERE state = 'release_failed') AS failed
    FROM lifecycle.allocation WHERE state <> 'released' AND slot IS NOT NULL GROUP BY node_id
) a USING (node_id)
WHERE g.instance_id IS NULL;

-- +goose Down
DROP TRIGGER room_of_old_allocation ON lifecycle.allocation;
DROP TRIGGER room_of_allocation ON lifecycle.allocation;
DROP TRIGGER room_of_new_allocation ON lifecycle.allocation;
DROP TRIGGER room_of_gate ON lifecycle.node_gate;
DROP TRIGGER room_of_new_gate ON lifecycle.node_gate;
DROP FUNCTION lifecycle.room_of_allocation();
DROP FUNCTION lifecycle.room_of_gate();
DROP TABLE lifecycle.node_room;
