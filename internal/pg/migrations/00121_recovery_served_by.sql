-- +goose Up
-- Which replica of nodeapi serves the node of an active workspace, as the watchdog's tables have it: NULL if none does. Triggers keep it in the
-- transaction of what changes it, so that a round of the watchdog finds those that are not served without reading the others.
ALTER TABLE recovery.watch_workspace ADD COLUMN served_by uuid;

-- +goose StatementBegin
CREATE FUNCTION recovery.server_of(node uuid) RETURNS uuid LANGUAGE sql STABLE AS $$
    SELECT s.replica_id FROM recovery.watch_session s WHERE s.node_id = node AND s.serving ORDER BY s.generation DESC LIMIT 1
$$;

CREATE FUNCTION recovery.served_workspace() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.served_by := recovery.server_of(COALESCE(NEW.node_id, (
        SELECT i.node_id FROM recovery.watch_instance i WHERE i.workspace_id = NEW.workspace_id AND i.epoch = NEW.epoch)));
    RETURN NEW;
END $$;

CREATE FUNCTION recovery.served_instance() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE recovery.watch_workspace w SET served_by = recovery.server_of(NEW.node_id)
    WHERE w.workspace_id = NEW.workspace_id AND w.epoch = NEW.epoch AND w.node_id IS NULL
        AND w.served_by IS DISTINCT FROM recovery.server_of(NEW.node_id);
    RETURN NULL;
END $$;

CREATE FUNCTION recovery.served_node() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    node   uuid := COALESCE(NEW.node_id, OLD.node_id);
    server uuid := recovery.server_of(node);
BEGIN
    UPDATE recovery.watch_workspace w SET served_by = server
    WHERE w.node_id = node AND w.state = 'active' AND w.served_by IS DISTINCT FROM server;
    UPDATE recovery.watch_workspace w SET served_by = server FROM recovery.watch_instance i
    WHERE i.node_id = node AND w.workspace_id = i.workspace_id AND w.epoch = i.epoch AND w.node_id IS NULL AND w.state = 'active'
        AND w.served_by IS DISTINCT FROM server;
    RETURN NULL;
END $$;
-- +goose StatementEnd

CREATE INDEX watch_instance_of_node ON recovery.watch_instance (node_id) WHERE node_id IS NOT NULL;

CREATE TRIGGER served_workspace BEFORE INSERT OR UPDATE OF node_id, epoch, state ON recovery.watch_workspace
    FOR EACH ROW WHEN (NEW.state = 'active') EXECUTE FUNCTION recovery.served_workspace();
CREATE TRIGGER served_instance AFTER INSERT OR UPDATE OF node_id ON recovery.watch_instance
    FOR EACH ROW WHEN (NEW.node_id IS NOT NULL) EXECUTE FUNCTION recovery.served_instance();
CREATE TRIGGER served_node AFTER INSERT OR DELETE OR UPDATE OF replica_id, generation, serving ON recovery.watch_session
    FOR EACH ROW EXECUTE FUNCTION recovery.served_node();

UPDATE recovery.watch_workspace w SET served_by = recovery.server_of(COALESCE(w.node_id, (
    SELECT i.node_id FROM recovery.watch_instance i WHERE i.workspace_id = w.workspace_id AND i.epoch = w.epoch)))
WHERE w.state = 'active';

CREATE INDEX watch_workspace_served_by ON recovery.watch_workspace (served_by) WHERE state = 'active';

-- +goose Down
DROP TRIGGER served_node ON recovery.watch_session;
DROP TRIGGER served_instance ON recovery.watch_instance;
DROP TRIGGER served_workspace ON recovery.watch_workspace;
DROP FUNCTION recovery.served_node();
DROP FUNCTION recovery.served_instance();
DROP FUNCTION recovery.served_workspace();
DROP FUNCTION recovery.server_of(uuid);
DROP INDEX recovery.watch_instance_of_node;
ALTER TABLE recovery.watch_workspace DROP COLUMN served_by;
