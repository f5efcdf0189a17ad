-- +goose Up

-- Tells every process that a table which all of them follow has changed, at the commit of the change: the name of the table, on the channel mesh_settings.
-- +goose StatementBegin
CREATE FUNCTION mesh.notify_settings() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_notify('mesh_settings', TG_TABLE_NAME);
    RETURN NULL;
END
$$;
-- +goose StatementEnd

CREATE TRIGGER notify_settings AFTER INSERT OR UPDATE OR DELETE ON mesh.policy FOR EACH STATEMENT EXECUTE FUNCTION mesh.notify_settings();
CREATE TRIGGER notify_settings AFTER INSERT OR UPDATE OR DELETE ON mesh.signing_key FOR EACH STATEMENT EXECUTE FUNCTION mesh.notify_settings();
CREATE TRIGGER notify_settings AFTER INSERT OR UPDATE OR DELETE ON mesh.key_rotation FOR EACH STATEMENT EXECUTE FUNCTION mesh.notify_settings();

-- +goose Down
DROP TRIGGER notify_settings ON mesh.key_rotation;
DROP TRIGGER notify_settings ON mesh.signing_key;
DROP TRIGGER notify_settings ON mesh.policy;
DROP FUNCTION mesh.notify_settings();
