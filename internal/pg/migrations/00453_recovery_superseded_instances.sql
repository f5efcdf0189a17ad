-- +goose Up
-- Whether an ended instance is of an earlier epoch than its workspace has, so that the watchdog may forget it. Triggers
-- keep it in the transaction of what changes it: without it each round reads the ended instances of the epochs that
-- workspaces have, which stay, to find those.
ALTER TABLE recovery.watch_instance ADD COLUMN superseded boolean NOT NULL DEFAULT false;

-- +goose StatementBegin
CREATE FUNCTION recovery.superseded_instance() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.superseded := EXISTS (
        SELECT FROM recovery.watch_workspace w WHERE w.workspace_id = NEW.workspace_id AND w.epoch > NEW.epoch);
    RETURN NEW;
END $$;

CREATE FUNCTION recovery.supersede_instances() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE recovery.watch_instance i SET superseded = true
    WHERE i.workspace_id = NEW.workspace_id AND i.epoch < NEW.epoch AND i.state = 'ended' AND NOT i.superseded;
    RETURN NULL;
END $$;
-- +goose StatementEnd

CREATE TRIGGER superseded_instance BEFORE INSERT OR UPDATE OF state ON recovery.watch_instance
    FOR EACH ROW WHEN (NEW.state = 'ended') EXECUTE FUNCTION recovery.superseded_instance();
CREATE TRIGGER supersede_inserted AFTER INSERT ON recovery.watch_workspace
    FOR EACH ROW EXECUTE FUNCTION recovery.supersede_instances();
CREATE TRIGGER supersede_updated AFTER UPDATE OF epoch ON recovery.watch_workspace
    FOR EACH ROW WHEN (NEW.epoch > OLD.epoch) EXECUTE FUNCTION recovery.supersede_instances();

UPDATE recovery.watch_instance i SET superseded = true FROM recovery.watch_workspace w
WHERE w.workspace_id = i.workspace_id AND i.epoch < w.epoch AND i.state = 'ended';

-- +goose Down
DROP TRIGGER supersede_updated ON recovery.watch_workspace;
DROP TRIGGER supersede_inserted ON recovery.watch_workspace;
DROP TRIGGER superseded_instance ON recovery.watch_instance;
DROP FUNCTION recovery.supersede_instances();
DROP FUNCTION recovery.superseded_instance();
ALTER TABLE recovery.watch_instance DROP COLUMN superseded;
