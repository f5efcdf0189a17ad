-- +goose Up

-- served_node ran for each row of recovery.watch_session, and planned a query each time. It runs for each statement now, and for the nodes whose
-- serving session has changed: a session that is over and stays over, or goes, changes no workspace.
DROP TRIGGER served_node ON recovery.watch_session;
DROP FUNCTION recovery.served_node();

-- +goose StatementBegin
CREATE FUNCTION recovery.served_nodes() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    nodes uuid[];
BEGIN
    CASE TG_OP
    WHEN 'INSERT' THEN
        SELECT array_agg(DISTINCT n.node_id) INTO nodes FROM new_sessions n WHERE n.serving;
    WHEN 'DELETE' THEN
        SELECT array_agg(DISTINCT o.node_id) INTO nodes FROM old_sessions o WHERE o.serving;
    ELSE
        SELECT array_agg(DISTINCT n.node_id) INTO nodes FROM new_sessions n JOIN old_sessions o USING (session_id)
        WHERE (n.serving OR o.serving)
            AND (n.replica_id, n.generation, n.serving) IS DISTINCT FROM (o.replica_id, o.generation, o.serving);
    END CASE;
    IF nodes IS NULL THEN
        RETURN NULL;
    END IF;
    UPDATE recovery.watch_workspace w SET served_by = recovery.server_of(w.node_id)
    WHERE w.node_id = ANY (nodes) AND w.state = 'active' AND w.served_by IS DISTINCT FROM recovery.server_of(w.node_id);
    UPDATE recovery.watch_workspace w SET served_by = recovery.server_of(i.node_id) FROM recovery.watch_instance i
    WHERE i.node_id = ANY (nodes) AND w.workspace_id = i.workspace_id AND w.epoch = i.epoch AND w.node_id IS NULL AND w.state = 'active'
        AND w.served_by IS DISTINCT FROM recovery.server_of(i.node_id);
    RETURN NULL;
END $$;
-- +goose StatementEnd

-- A trigger with tables of the changed rows is for one kind of statement, and for all columns.
CREATE TRIGGER served_inserted AFTER INSERT ON recovery.watch_session
    REFERENCING NEW TABLE AS new_sessions FOR EACH STATEMENT EXECUTE FUNCTION recovery.served_nodes();
CREATE TRIGGER served_updated AFTER UPDATE ON recovery.watch_session
    REFERENCING OLD TABLE AS old_sessions NEW TABLE AS new_sessions FOR EACH STATEMENT EXECUTE FUNCTION recovery.served_nodes();
CREATE TRIGGER served_deleted AFTER DELETE ON recovery.watch_session
    REFERENCING OLD TABLE AS old_sessions FOR EACH STATEMENT EXECUTE FUNCTION recovery.served_nodes();

-- +goose Down
DROP TRIGGER served_inserted ON recovery.watch_session;
DROP TRIGGER served_updated ON recovery.watch_session;
DROP TRIGGER served_deleted ON recovery.watch_session;
DROP FUNCTION recovery.served_nodes();

-- +goose StatementBegin
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
CREATE TRIGGER served_node AFTER INSERT OR DELETE OR UPDATE OF replica_id, generation, serving ON recovery.watch_session
    FOR EACH ROW EXECUTE FUNCTION recovery.served_node();
