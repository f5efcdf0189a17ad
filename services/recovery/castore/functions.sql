SELECT pg_advisory_xact_lock(hashtextextended('mesh_ca', 0));

CREATE SCHEMA IF NOT EXISTS mesh_ca;

-- The functions that read an end catch errors, which before Postgres 17 no parallel process may: an index of a large table
-- would fail.

-- When a certificate in DER ends; null if it cannot be read. Certificate and TBSCertificate are entered; version, serial,
-- algorithm and issuer are skipped; Validity is entered, notBefore is skipped, notAfter is read.
CREATE OR REPLACE FUNCTION mesh_ca.certificate_end(der bytea) RETURNS timestamptz
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL UNSAFE AS $$
DECLARE
    at   integer := 0;
    tag  integer;
    size integer;
    more integer;
    shown text;
BEGIN
    FOR step IN 1..9 LOOP
        tag := get_byte(der, at);
        size := get_byte(der, at + 1);
        at := at + 2;
        IF size > 127 THEN
            more := size - 128;
            size := 0;
            FOR i IN 1..more LOOP
                size := size * 256 + get_byte(der, at);
                at := at + 1;
            END LOOP;
        END IF;
        CASE
        WHEN step IN (1, 2, 7) THEN
            IF tag <> 48 THEN
                RETURN NULL;
            END IF;
        WHEN step = 3 AND tag <> 160 THEN
            at := at - 2; -- no version: this was the serial, of at most 20 bytes
        WHEN step < 9 THEN
            at := at + size;
        ELSE
            shown := encode(substring(der FROM at + 1 FOR size), 'escape');
            IF tag = 23 AND shown ~ '^[0-9]{12}Z$' THEN
                shown := CASE WHEN shown >= '5' THEN '19' ELSE '20' END || shown;
            ELSIF tag <> 24 OR shown !~ '^[0-9]{14}Z$' THEN
                RETURN NULL;
            END IF;
            RETURN make_timestamptz(substr(shown, 1, 4)::integer, substr(shown, 5, 2)::integer, substr(shown, 7, 2)::integer,
                substr(shown, 9, 2)::integer, substr(shown, 11, 2)::integer, substr(shown, 13, 2)::integer, 'UTC');
        END CASE;
    END LOOP;
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

-- When a token ends, a JWT in its compact form; null if it cannot be read or does not end.
CREATE OR REPLACE FUNCTION mesh_ca.token_end(token bytea) RETURNS timestamptz
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL UNSAFE AS $$
DECLARE
    claims text := translate(split_part(encode(token, 'escape'), '.', 2), '-_', '+/');
BEGIN
    RETURN to_timestamp((convert_from(decode(rpad(claims, (length(claims) + 3) / 4 * 4, '='), 'base64'), 'UTF8')::jsonb
        ->> 'exp')::double precision);
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

-- When what was revoked ends; null if that is not known.
CREATE OR REPLACE FUNCTION mesh_ca.revocation_end(info bytea) RETURNS timestamptz
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL UNSAFE AS $$
DECLARE
    ends text := convert_from(info, 'UTF8')::jsonb ->> 'ExpiresAt';
BEGIN
    -- The zero time of the program that writes it.
    RETURN CASE WHEN ends ~ '^000[01]-' THEN NULL ELSE ends::timestamptz END;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

-- The youngest that may be cut, whatever a caller says: what has ended by this server's clock, and for longer than the
-- authority takes a token whose time is over.
CREATE OR REPLACE FUNCTION mesh_ca.youngest(until timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE STRICT AS $$ SELECT least(until, now() - interval '10 minutes') $$;

CREATE OR REPLACE FUNCTION mesh_ca.cut_certificates(until timestamptz, most integer) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH over AS (
        SELECT c.nkey FROM @schema@.x509_certs c WHERE mesh_ca.certificate_end(c.nvalue) < mesh_ca.youngest(until)
        ORDER BY mesh_ca.certificate_end(c.nvalue) LIMIT most),
    gone AS (
        DELETE FROM @schema@.x509_certs c USING over o WHERE c.nkey = o.nkey
            AND mesh_ca.certificate_end(c.nvalue) < mesh_ca.youngest(until) RETURNING c.nkey),
    data AS (DELETE FROM @schema@.x509_certs_data d USING gone g WHERE d.nkey = g.nkey)
    SELECT count(*) FROM gone
$$;

CREATE OR REPLACE FUNCTION mesh_ca.cut_tokens(until timestamptz, most integer) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH over AS (
        SELECT t.nkey FROM @schema@.used_ott t WHERE mesh_ca.token_end(t.nvalue) < mesh_ca.youngest(until)
        ORDER BY mesh_ca.token_end(t.nvalue) LIMIT most),
    gone AS (
        DELETE FROM @schema@.used_ott t USING over o WHERE t.nkey = o.nkey
            AND mesh_ca.token_end(t.nvalue) < mesh_ca.youngest(until) RETURNING t.nkey)
    SELECT count(*) FROM gone
$$;

-- A revocation stays as long as its certificate is there and has not ended, whatever the revocation says.
CREATE OR REPLACE FUNCTION mesh_ca.cut_revocations(until timestamptz, most integer) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH over AS (
        SELECT r.nkey FROM @schema@.revoked_x509_certs r WHERE mesh_ca.revocation_end(r.nvalue) < mesh_ca.youngest(until)
            AND NOT EXISTS (SELECT FROM @schema@.x509_certs c WHERE c.nkey = r.nkey
                AND coalesce(mesh_ca.certificate_end(c.nvalue) >= mesh_ca.youngest(until), true))
        ORDER BY mesh_ca.revocation_end(r.nvalue) LIMIT most),
    gone AS (
        DELETE FROM @schema@.revoked_x509_certs r USING over o WHERE r.nkey = o.nkey
            AND mesh_ca.revocation_end(r.nvalue) < mesh_ca.youngest(until) RETURNING r.nkey)
    SELECT count(*) FROM gone
$$;

GRANT USAGE ON SCHEMA @schema@ TO @role@;
GRANT USAGE, CREATE ON SCHEMA mesh_ca TO @role@;
GRANT SELECT, DELETE ON @schema@.x509_certs, @schema@.x509_certs_data, @schema@.used_ott, @schema@.revoked_x509_certs TO @role@;
ALTER FUNCTION mesh_ca.cut_certificates(timestamptz, integer) OWNER TO @role@;
ALTER FUNCTION mesh_ca.cut_tokens(timestamptz, integer) OWNER TO @role@;
ALTER FUNCTION mesh_ca.cut_revocations(timestamptz, integer) OWNER TO @role@;
REVOKE CREATE ON SCHEMA mesh_ca FROM @role@;
REVOKE ALL ON FUNCTION mesh_ca.cut_certificates(timestamptz, integer), mesh_ca.cut_tokens(timestamptz, integer),
    mesh_ca.cut_revocations(timestamptz, integer) FROM PUBLIC;
DO $$
BEGIN
    EXECUTE format('GRANT EXECUTE ON FUNCTION mesh_ca.cut_certificates(timestamptz, integer), mesh_ca.cut_tokens(timestamptz, integer), '
        'mesh_ca.cut_revocations(timestamptz, integer) TO %I', session_user);
END $$;
