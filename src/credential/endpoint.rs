//! Parses the account's endpoint, and shows it without anything that may be a secret.

use azure_core::http::Url;

use super::ConfigError;

pub(crate) const SETTING: &str = "the endpoint (COSMOS_ENDPOINT)";

/// Names a host for which the SDK also accepts plain `http://`, besides the loopback names.
const EMULATOR_HOST_VARIABLE: &str = "AZURE_COSMOS_EMULATOR_HOST";

/// Parses an account endpoint, `https://<account>.documents.azure.com/` or an emulator's.
pub(crate) fn parse(text: &str) -> Result<Url, ConfigError> {
    parse_with_emulator_host(text, std::env::var(EMULATOR_HOST_VARIABLE).ok().as_deref())
}

fn parse_with_emulator_host(text: &str, emulator_host: Option<&str>) -> Result<Url, ConfigError> {
    let refuse = |problem: String| Err(ConfigError::invalid(SETTING, problem));
    if text.to_ascii_lowercase().contains("accountkey=") {
        return refuse("holds a connection string: set COSMOS_CONNECTION_STRING instead".into());
    }
    let Ok(url) = Url::parse(text.trim()) else {
        return refuse("is not a URL like https://<account>.documents.azure.com/".into());
    };
    let Some(host) = url.host_str().filter(|host| !host.is_empty()) else {
        return refuse("has no host name: expected https://<account>.documents.azure.com/".into());
    };
    match url.scheme() {
        "https" => {}
        "http" if is_emulator_host(host, emulator_host) => {}
        "http" => {
            return refuse(format!(
                "must use https for the host {host}: plain http is for an emulator on this machine, or on the host of \
                 {EMULATOR_HOST_VARIABLE}"
            ))
        }
        _ => return refuse("must start with https://".into()),
    }
    let has_more = !url.username().is_empty()
        || url.password().is_some()
        || url.path() != "/"
        || url.query().is_some()
        || url.fragment().is_some();
    if has_more {
        return refuse(format!(
            "must be only scheme, host and port, with no user, path, query or fragment: {}/",
            url.origin().ascii_serialization()
        ));
    }
    Ok(url)
}

/// Whether the endpoint is that of an emulator on this machine, or on the host of the environment variable.
pub(crate) fn is_emulator(endpoint: &Url) -> bool {
    let named = std::env::var(EMULATOR_HOST_VARIABLE).ok();
    endpoint.host_str().is_some_and(|host| is_emulator_host(host, named.as_deref()))
}

fn is_emulator_host(host: &str, emulator_host: Option<&str>) -> bool {
    const LOOPBACK: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];
    LOOPBACK.into_iter().chain(emulator_host).any(|known| host.eq_ignore_ascii_case(known))
}

/// Scheme, host and port, for `Debug` output. Any other text may hold a secret and is not shown.
pub(crate) fn shown(text: &str) -> String {
    match parse(text) {
        Ok(url) => url.origin().ascii_serialization(),
        Err(_) => "<not an endpoint>".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        parse_with_emulator_host(text, None).unwrap_err().to_string()
    }

    #[test]
    fn the_usual_forms_are_the_same_endpoint() {
        let plain = parse("https://acc.documents.azure.com").unwrap();
        assert_eq!(plain, parse("https://acc.documents.azure.com/").unwrap());
        assert_eq!(plain, parse(" https://ACC.documents.azure.com:443/ ").unwrap());
    }

    #[test]
    fn plain_http_is_for_emulators_only() {
        for local in ["http://localhost:8081", "http://127.0.0.1:8081/", "http://[::1]:8081/"] {
            assert!(parse_with_emulator_host(local, None).is_ok(), "{local}");
        }
        assert!(problem("http://acc.documents.azure.com/").contains("must use https"));
        assert!(problem("http://cosmos:8081/").contains("AZURE_COSMOS_EMULATOR_HOST"));
        assert!(parse_with_emulator_host("http://cosmos:8081/", Some("Cosmos")).is_ok());
        assert!(is_emulator_host("cosmos", Some("Cosmos")) && !is_emulator_host("cosmos", None));
        let local = |text: &str| is_emulator(&Url::parse(text).unwrap());
        assert!(local("http://localhost:8081/") && !local("https://acc.documents.azure.com/"));
    }

    #[test]
    fn other_forms_are_refused() {
        assert!(problem("").contains("not a URL"));
        assert!(problem("acc.documents.azure.com").contains("not a URL"));
        assert!(problem("ftp://acc.documents.azure.com/").contains("https://"));
        assert!(problem("https://acc.documents.azure.com/dbs/x").contains("no user, path"));
        assert!(problem("https://acc.documents.azure.com/?a=b").contains("no user, path"));
    }

    #[test]
    fn a_secret_in_the_endpoint_is_not_repeated() {
        for text in [
            "AccountEndpoint=https://acc.documents.azure.com:443/;AccountKey=c2VjcmV0;",
            "https://acc.documents.azure.com:443/;AccountKey=c2VjcmV0;",
            "https://user:c2VjcmV0@acc.documents.azure.com/",
            "https://acc.documents.azure.com/c2VjcmV0",
            "https://acc.documents.azure.com/?sig=c2VjcmV0",
            "c2VjcmV0",
        ] {
            assert!(!problem(text).contains("c2VjcmV0"), "{}", problem(text));
            assert!(!shown(text).contains("c2VjcmV0"));
        }
        assert!(problem("AccountEndpoint=https://a/;AccountKey=k").contains("COSMOS_CONNECTION_STRING"));
    }
}
