-- +goose Up

-- The highest era, not below the database's, of a number that was shown as evidence. It says that numbers of this era
-- were given by a history that is lost, and would be given twice: the mode ends with an era above it.
ALTER TABLE recovery.rollback ADD COLUMN seen_era bigint NOT NULL DEFAULT -1;

-- raise_era_after_rollback raises the era above every number that was shown as evidence, and returns the era as it is
-- then. Without such evidence it changes nothing. It runs with its owner's rights, because no service may write the
-- era; recovery calls it in the transaction that ends the mode.
-- +goose StatementBegin
CREATE FUNCTION mesh.raise_era_after_rollback(why text) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    now_is bigint;
BEGIN
    UPDATE mesh.era e SET era = r.seen_era + 1, raised_at = clock_timestamp(), raised_by = session_user, reason = why
        FROM recovery.rollback r WHERE r.state = 'active' AND r.seen_era >= e.era;
    SELECT e.era INTO STRICT now_is FROM mesh.era e;
    RETURN now_is;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION mesh.raise_era_after_rollback(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mesh.raise_era_after_rollback(text) TO recovery;

-- +goose Down
DROP FUNCTION mesh.raise_era_after_rollback(text);
ALTER TABLE recovery.rollback DROP COLUMN seen_era;
