//! Reads a configuration from environment variables.
//!
//! The module reads variables through a lookup function, so that it does not depend on the process. The variables
//! select a credential in a fixed order, and the log shows the reason. Contradictory variables are an error, because
//! the variable that the order ignores may be the intended one.

use azure_core::credentials::Secret;

use super::{ConfigError, CosmosDBProviderConfig};
use crate::credential::{endpoint, Cloud, Credential, ManagedIdentity, Problems, WorkloadIdentity};

const ENDPOINT: &str = "COSMOS_ENDPOINT";
const KEY: &str = "COSMOS_KEY";
const CONNECTION_STRING: &str = "COSMOS_CONNECTION_STRING";
const CREDENTIAL: &str = "COSMOS_CREDENTIAL";
const DATABASE: &str = "COSMOS_DATABASE";
const CONTAINER: &str = "COSMOS_CONTAINER";
const REGION: &str = "COSMOS_REGION";
const CREATE_IF_MISSING: &str = "COSMOS_CREATE_IF_MISSING";
const THROUGHPUT: &str = "COSMOS_THROUGHPUT";
const TENANT_ID: &str = "AZURE_TENANT_ID";
const CLIENT_ID: &str = "AZURE_CLIENT_ID";
const CLIENT_SECRET: &str = "AZURE_CLIENT_SECRET";
const TOKEN_FILE: &str = "AZURE_FEDERATED_TOKEN_FILE";
const AUTHORITY_HOST: &str = "AZURE_AUTHORITY_HOST";
const TOKEN_SCOPE: &str = "AZURE_COSMOS_AAD_SCOPE_OVERRIDE";
/// App Service, Functions and Container Apps set this variable.
const IDENTITY_ENDPOINT: &str = "IDENTITY_ENDPOINT";
/// The older name of `IDENTITY_ENDPOINT`. Some hosts still set it.
const MSI_ENDPOINT: &str = "MSI_ENDPOINT";

/// Reads and validates a configuration.
pub(super) fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<CosmosDBProviderConfig, ConfigError> {
    let variables = Variables { lookup };
    let mut problems = Problems::default();
    let selected = problems.collect(variables.credential());
    let mut config = CosmosDBProviderConfig {
        endpoint: problems.collect(variables.endpoint()).flatten(),
        credential: selected.as_ref().map(|selected| selected.credential.clone()),
        token_scope: variables.get(TOKEN_SCOPE),
        create_if_missing: problems.collect(variables.create_if_missing()).flatten(),
        throughput: problems.collect(variables.throughput()).unwrap_or_default(),
        ..CosmosDBProviderConfig::default()
    };
    config.cloud = problems.collect(variables.cloud(&config)).unwrap_or_default();
    config.database = variables.get(DATABASE).unwrap_or(config.database);
    config.container = variables.get(CONTAINER).unwrap_or(config.container);
    config = config.with_preferred_regions(problems.collect(variables.regions()).unwrap_or_default());

    problems.into_result()?;
    config.validate()?;
    if let Some(selected) = selected {
        tracing::info!(
            credential = %selected.credential.kind(),
            reason = selected.reason,
            "selected the credential for Cosmos DB"
        );
    }
    Ok(config)
}

/// The values of `COSMOS_CREDENTIAL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Key,
    ConnectionString,
    ManagedIdentity,
    WorkloadIdentity,
    ClientSecret,
    DeveloperTools,
}

impl Choice {
    const NAMES: [(&'static str, Self); 6] = [
        ("key", Self::Key),
        ("connection_string", Self::ConnectionString),
        ("managed_identity", Self::ManagedIdentity),
        ("workload_identity", Self::WorkloadIdentity),
        ("client_secret", Self::ClientSecret),
        ("developer_tools", Self::DeveloperTools),
    ];

    fn parse(text: &str) -> Result<Self, ConfigError> {
        let wanted = text.to_ascii_lowercase().replace('-', "_");
        let found = Self::NAMES.into_iter().find(|(name, _)| *name == wanted);
        found.map(|(_, choice)| choice).ok_or_else(|| {
            let names = Self::NAMES.map(|(name, _)| name).join(", ");
            ConfigError::invalid(CREDENTIAL, format!("must be one of {names}"))
        })
    }

    /// The variable with the account secret of this choice. All other secrets contradict it.
    fn own_secret(self) -> Option<&'static str> {
        match self {
            Self::Key => Some(KEY),
            Self::ConnectionString => Some(CONNECTION_STRING),
            _ => None,
        }
    }
}

/// A credential, and the reason for its choice.
struct Selection {
    credential: Credential,
    reason: &'static str,
}

struct Variables<F> {
    lookup: F,
}

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    /// The value of a variable. An empty or blank variable counts as not set.
    fn get(&self, name: &str) -> Option<String> {
        let value = (self.lookup)(name)?;
        let value = value.trim();
        (!value.is_empty()).then(|| value.to_owned())
    }

    fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn endpoint(&self) -> Result<Option<String>, ConfigError> {
        match self.get(ENDPOINT) {
            None if !self.is_set(CONNECTION_STRING) => Err(ConfigError::missing(
                vec![ENDPOINT],
                "set it to https://<account>.documents.azure.com/, or set COSMOS_CONNECTION_STRING instead",
            )),
            endpoint => Ok(endpoint),
        }
    }

    fn credential(&self) -> Result<Selection, ConfigError> {
        let explicit = self.get(CREDENTIAL).map(|text| Choice::parse(&text)).transpose()?;
        self.refuse_contradicting_secrets(explicit)?;
        let (choice, reason) = match explicit {
            Some(choice) => (choice, "COSMOS_CREDENTIAL selects it"),
            None => self.implied_choice(),
        };
        let credential = match choice {
            Choice::Key => self.key(),
            Choice::ConnectionString => self.connection_string(),
            Choice::ManagedIdentity => Ok(self.managed_identity()),
            Choice::WorkloadIdentity => self.workload_identity(reason),
            Choice::ClientSecret => self.client_secret(reason),
            Choice::DeveloperTools => Ok(Credential::DeveloperTools),
        }?;
        Ok(Selection { credential, reason })
    }

    fn implied_choice(&self) -> (Choice, &'static str) {
        let order = [
            (KEY, Choice::Key, "COSMOS_KEY is set"),
            (CONNECTION_STRING, Choice::ConnectionString, "COSMOS_CONNECTION_STRING is set"),
            (TOKEN_FILE, Choice::WorkloadIdentity, "AZURE_FEDERATED_TOKEN_FILE is set"),
            (CLIENT_SECRET, Choice::ClientSecret, "AZURE_CLIENT_SECRET is set"),
            (IDENTITY_ENDPOINT, Choice::ManagedIdentity, "IDENTITY_ENDPOINT is set by the host"),
            (MSI_ENDPOINT, Choice::ManagedIdentity, "MSI_ENDPOINT is set by the host"),
        ];
        let found = order.into_iter().find(|(variable, ..)| self.is_set(variable));
        found.map_or(
            (
                Choice::DeveloperTools,
                "no variable points to a key or an identity; on a virtual machine set \
                 COSMOS_CREDENTIAL=managed_identity",
            ),
            |(_, choice, reason)| (choice, reason),
        )
    }

    /// Refuses an account secret beside another credential. Either may be a leftover, and only the user knows which.
    fn refuse_contradicting_secrets(&self, explicit: Option<Choice>) -> Result<(), ConfigError> {
        let secrets: Vec<_> = [KEY, CONNECTION_STRING].into_iter().filter(|name| self.is_set(name)).collect();
        match explicit {
            None if secrets.len() > 1 => Err(ConfigError::contradiction(
                secrets,
                "set only one of them, because a connection string contains a key",
            )),
            Some(choice) if secrets.iter().any(|name| choice.own_secret() != Some(name)) => {
                let own = choice.own_secret();
                let foreign = secrets.into_iter().filter(|name| own != Some(name));
                Err(ConfigError::contradiction(
                    [CREDENTIAL].into_iter().chain(foreign).collect(),
                    "unset the variables that COSMOS_CREDENTIAL does not select, or unset COSMOS_CREDENTIAL",
                ))
            }
            _ => Ok(()),
        }
    }

    #[cfg(feature = "key_auth")]
    fn key(&self) -> Result<Credential, ConfigError> {
        let [key] = self.all([KEY], "COSMOS_CREDENTIAL selects it")?;
        Ok(Credential::account_key(key))
    }

    #[cfg(feature = "key_auth")]
    fn connection_string(&self) -> Result<Credential, ConfigError> {
        let [text] = self.all([CONNECTION_STRING], "COSMOS_CREDENTIAL selects it")?;
        Credential::connection_string(&text)
    }

    #[cfg(not(feature = "key_auth"))]
    fn key(&self) -> Result<Credential, ConfigError> {
        Err(self.key_auth_disabled(KEY))
    }

    #[cfg(not(feature = "key_auth"))]
    fn connection_string(&self) -> Result<Credential, ConfigError> {
        Err(self.key_auth_disabled(CONNECTION_STRING))
    }

    #[cfg(not(feature = "key_auth"))]
    fn key_auth_disabled(&self, secret: &'static str) -> ConfigError {
        let setting = if self.is_set(secret) { secret } else { CREDENTIAL };
        ConfigError::KeyAuthDisabled { setting }
    }

    fn managed_identity(&self) -> Credential {
        let identity = self.get(CLIENT_ID).map(ManagedIdentity::ClientId);
        Credential::ManagedIdentity(identity.unwrap_or_default())
    }

    fn workload_identity(&self, reason: &str) -> Result<Credential, ConfigError> {
        let [token_file, tenant_id, client_id] = self.all([TOKEN_FILE, TENANT_ID, CLIENT_ID], reason)?;
        let identity =
            WorkloadIdentity::default().with_token_file(token_file).with_tenant_id(tenant_id).with_client_id(client_id);
        Ok(Credential::WorkloadIdentity(identity))
    }

    fn client_secret(&self, reason: &str) -> Result<Credential, ConfigError> {
        let [secret, tenant_id, client_id] = self.all([CLIENT_SECRET, TENANT_ID, CLIENT_ID], reason)?;
        Ok(Credential::client_secret(tenant_id, client_id, Secret::new(secret)))
    }

    /// The values of these variables, or one error that names the missing ones and the reason for needing them.
    fn all<const N: usize>(&self, names: [&'static str; N], reason: &str) -> Result<[String; N], ConfigError> {
        let missing: Vec<_> = names.into_iter().filter(|name| !self.is_set(name)).collect();
        if missing.is_empty() {
            return Ok(names.map(|name| self.get(name).unwrap_or_default()));
        }
        Err(ConfigError::missing(
            missing,
            format!(
                "the selected credential ({reason}) needs {}. To select another, set COSMOS_CREDENTIAL",
                names.join(", ")
            ),
        ))
    }

    /// The cloud of `AZURE_AUTHORITY_HOST`. An error if the endpoint is in another cloud.
    fn cloud(&self, config: &CosmosDBProviderConfig) -> Result<Cloud, ConfigError> {
        let uses_key = config.credential().is_some_and(Credential::is_key);
        let Some(authority_host) = self.get(AUTHORITY_HOST).filter(|_| !uses_key) else {
            return Ok(Cloud::FromEndpoint);
        };
        let named = Cloud::from_authority_host(&authority_host)?;
        let endpoint = config.endpoint().and_then(|text| endpoint::parse(text).ok());
        match endpoint.as_ref().and_then(Cloud::of_account) {
            // An unknown authority may serve any cloud.
            Some(cloud) if cloud != named && !matches!(named, Cloud::Custom { .. }) => Err(ConfigError::contradiction(
                vec![ENDPOINT, AUTHORITY_HOST],
                "the account and the authority are in different clouds: correct one, or unset AZURE_AUTHORITY_HOST to \
                 use the cloud of the endpoint",
            )),
            _ => Ok(named),
        }
    }

    fn regions(&self) -> Result<Vec<String>, ConfigError> {
        let Some(list) = self.get(REGION) else {
            return Ok(Vec::new());
        };
        let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
        let regions: Vec<_> = names.map(str::to_owned).collect();
        if regions.is_empty() {
            return Err(ConfigError::invalid(
                REGION,
                "must be a region such as West Europe, or several separated by commas",
            ));
        }
        Ok(regions)
    }

    fn create_if_missing(&self) -> Result<Option<bool>, ConfigError> {
        let value = self.get(CREATE_IF_MISSING).map(|text| text.to_ascii_lowercase());
        match value.as_deref() {
            None => Ok(None),
            Some("true" | "yes" | "1") => Ok(Some(true)),
            Some("false" | "no" | "0") => Ok(Some(false)),
            Some(_) => Err(ConfigError::invalid(CREATE_IF_MISSING, "must be true or false")),
        }
    }

    fn throughput(&self) -> Result<super::Throughput, ConfigError> {
        self.get(THROUGHPUT).map_or(Ok(super::Throughput::default()), |text| text.parse())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Throughput;

    const ACCOUNT: (&str, &str) = (ENDPOINT, "https://acc.documents.azure.com/");
    const SECRET: &str = "c2VjcmV0";
    #[cfg(feature = "key_auth")]
    const STRING: &str = "AccountEndpoint=https://acc.documents.azure.com:443/;AccountKey=c2VjcmV0;";

    fn from(variables: &[(&str, &str)]) -> Result<CosmosDBProviderConfig, ConfigError> {
        CosmosDBProviderConfig::from_lookup(|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| value.to_string())
        })
    }

    /// The kind of credential that these variables select for the usual account.
    fn selected(variables: &[(&str, &str)]) -> String {
        let config = from(&[&[ACCOUNT], variables].concat());
        config.unwrap().credential_kind()
    }

    /// The error for these variables, after checking that it shows no secret.
    fn problem(variables: &[(&str, &str)]) -> String {
        let error = from(variables).unwrap_err();
        let debug = format!("{error:?}");
        let text = error.to_string();
        assert!(!text.contains(SECRET) && !debug.contains(SECRET), "{text} {debug}");
        text
    }

    fn assert_names(problem: &str, names: &[&str]) {
        for name in names {
            assert!(problem.contains(name), "{name} is not named: {problem}");
        }
    }

    #[cfg(feature = "key_auth")]
    #[test]
    fn a_key_or_a_connection_string_is_used_if_it_is_set() {
        assert_eq!(selected(&[(KEY, SECRET)]), "account key");
        assert_eq!(selected(&[(KEY, SECRET), (CREDENTIAL, "key")]), "account key");
        let from_string = "account key from a connection string";
        assert_eq!(selected(&[(CONNECTION_STRING, STRING)]), from_string);
        assert_eq!(selected(&[(CONNECTION_STRING, STRING), (CREDENTIAL, "connection-string")]), from_string);
        let alone = from(&[(CONNECTION_STRING, STRING)]).unwrap();
        assert_eq!(alone.endpoint(), Some(ACCOUNT.1));
        assert!(alone.create_if_missing());
    }

    #[cfg(feature = "key_auth")]
    #[test]
    fn a_key_is_preferred_to_an_identity_that_the_host_offers() {
        let offered = [(KEY, SECRET), (TOKEN_FILE, "/t"), (IDENTITY_ENDPOINT, "http://x")];
        assert_eq!(selected(&offered), "account key");
        // Keys need no authority, so the authority of another cloud is no contradiction.
        let authority = (AUTHORITY_HOST, "https://login.chinacloudapi.cn");
        assert_eq!(selected(&[(KEY, SECRET), authority]), "account key");
    }

    #[cfg(not(feature = "key_auth"))]
    #[test]
    fn a_key_in_a_build_without_keys_is_an_error_that_names_the_feature() {
        for variables in [
            &[ACCOUNT, (KEY, SECRET)][..],
            &[ACCOUNT, (CONNECTION_STRING, SECRET)],
            &[ACCOUNT, (KEY, SECRET), (CREDENTIAL, "key")],
        ] {
            assert_names(&problem(variables), &["`key_auth`", variables[1].0]);
        }
        assert_names(&problem(&[ACCOUNT, (CREDENTIAL, "key")]), &["`key_auth`", CREDENTIAL]);
    }

    #[test]
    fn the_first_entra_credential_of_the_environment_is_selected() {
        let everything = [
            (TENANT_ID, "t"),
            (CLIENT_ID, "c"),
            (TOKEN_FILE, "/token"),
            (CLIENT_SECRET, SECRET),
            (IDENTITY_ENDPOINT, "http://x"),
            (MSI_ENDPOINT, "http://x"),
        ];
        let without = |names: &[&str]| -> String {
            let remaining: Vec<_> = everything.into_iter().filter(|(name, _)| !names.contains(name)).collect();
            selected(&remaining)
        };
        assert_eq!(without(&[]), "workload identity (client id c)");
        assert_eq!(without(&[TOKEN_FILE]), "client secret (tenant t, client id c)");
        let managed = "managed identity (user-assigned, client id c)";
        assert_eq!(without(&[TOKEN_FILE, CLIENT_SECRET]), managed);
        assert_eq!(without(&[TOKEN_FILE, CLIENT_SECRET, MSI_ENDPOINT]), managed);
        assert_eq!(without(&[TOKEN_FILE, CLIENT_SECRET, IDENTITY_ENDPOINT]), managed);
        assert_eq!(without(&[TOKEN_FILE, CLIENT_SECRET, CLIENT_ID]), "managed identity (system-assigned)");
        assert_eq!(
            without(&[TOKEN_FILE, CLIENT_SECRET, IDENTITY_ENDPOINT, MSI_ENDPOINT]),
            "developer tools (az or azd)"
        );
    }

    #[test]
    fn an_explicit_choice_has_priority_over_the_environment() {
        let pod = [(TENANT_ID, "t"), (CLIENT_ID, "c"), (TOKEN_FILE, "/token"), (CLIENT_SECRET, SECRET)];
        for (name, kind) in [
            ("managed_identity", "managed identity (user-assigned, client id c)"),
            ("Workload-Identity", "workload identity (client id c)"),
            ("CLIENT_SECRET", "client secret (tenant t, client id c)"),
            ("developer_tools", "developer tools (az or azd)"),
        ] {
            assert_eq!(selected(&[&pod[..], &[(CREDENTIAL, name)]].concat()), kind);
        }
        assert_eq!(selected(&[(CREDENTIAL, "managed_identity")]), "managed identity (system-assigned)");
        let unknown = problem(&[ACCOUNT, (CREDENTIAL, SECRET)]);
        assert_names(&unknown, &[CREDENTIAL, "workload_identity", "developer_tools"]);
    }

    #[test]
    fn entra_credentials_create_nothing_by_default() {
        assert!(!from(&[ACCOUNT]).unwrap().create_if_missing());
    }

    #[test]
    fn empty_variables_count_as_not_set() {
        let variables = [
            (KEY, ""),
            (CONNECTION_STRING, "  "),
            (CREDENTIAL, ""),
            (DATABASE, ""),
            (REGION, " "),
            (TOKEN_FILE, ""),
            (CLIENT_SECRET, ""),
            (IDENTITY_ENDPOINT, ""),
            (AUTHORITY_HOST, ""),
            (TOKEN_SCOPE, ""),
            (THROUGHPUT, ""),
            (CREATE_IF_MISSING, ""),
        ];
        assert_eq!(selected(&variables), "developer tools (az or azd)");
        let config = from(&[&[ACCOUNT], &variables[..]].concat()).unwrap();
        assert_eq!(config.database(), "duroxide");
        assert_names(&problem(&[(ENDPOINT, " ")]), &[ENDPOINT]);
    }

    #[test]
    fn a_key_beside_another_credential_is_refused() {
        let key = (KEY, SECRET);
        let string = (CONNECTION_STRING, SECRET);
        assert_names(&problem(&[ACCOUNT, key, string]), &[KEY, CONNECTION_STRING]);
        for name in ["managed_identity", "workload_identity", "client_secret", "developer_tools"] {
            let choice = (CREDENTIAL, name);
            assert_names(&problem(&[ACCOUNT, key, choice]), &[KEY, CREDENTIAL]);
            assert_names(&problem(&[ACCOUNT, string, choice]), &[CONNECTION_STRING, CREDENTIAL]);
            let all_three = problem(&[ACCOUNT, key, string, choice]);
            assert_names(&all_three, &[KEY, CONNECTION_STRING, CREDENTIAL]);
        }
        let other_secret = problem(&[ACCOUNT, string, (CREDENTIAL, "key")]);
        assert_names(&other_secret, &[CONNECTION_STRING, CREDENTIAL, "contradict"]);
        let both = problem(&[ACCOUNT, key, string, (CREDENTIAL, "connection_string")]);
        assert_names(&both, &[KEY, CREDENTIAL, "contradict"]);
    }

    #[cfg(feature = "key_auth")]
    #[test]
    fn a_connection_string_for_another_account_is_refused() {
        let other = (ENDPOINT, "https://other.documents.azure.com/");
        let problem = problem(&[other, (CONNECTION_STRING, STRING)]);
        assert_names(&problem, &[ENDPOINT, CONNECTION_STRING]);
    }

    #[cfg(feature = "key_auth")]
    #[test]
    fn bad_keys_and_connection_strings_are_refused_without_showing_them() {
        assert_names(&problem(&[ACCOUNT, (KEY, "c2VjcmV0!")]), &[KEY, "Base64"]);
        let bad = "AccountEndpoint=https://acc.documents.azure.com/;c2VjcmV0";
        assert_names(&problem(&[(CONNECTION_STRING, bad)]), &[CONNECTION_STRING]);
        assert_names(&problem(&[ACCOUNT, (CREDENTIAL, "key")]), &[KEY, CREDENTIAL]);
        let missing = problem(&[ACCOUNT, (CREDENTIAL, "connection_string")]);
        assert_names(&missing, &[CONNECTION_STRING, CREDENTIAL]);
        assert_names(&problem(&[(ENDPOINT, STRING)]), &[ENDPOINT, CONNECTION_STRING]);
    }

    #[test]
    fn one_error_names_all_missing_variables() {
        let nothing = problem(&[]);
        assert_names(&nothing, &[ENDPOINT, CONNECTION_STRING]);

        let half_a_principal = problem(&[(CLIENT_SECRET, SECRET)]);
        assert_names(&half_a_principal, &[ENDPOINT, TENANT_ID, CLIENT_ID, "2 problems"]);

        let half_a_pod = problem(&[ACCOUNT, (TOKEN_FILE, "/token"), (TENANT_ID, "t")]);
        assert_names(&half_a_pod, &["AZURE_CLIENT_ID not set", TOKEN_FILE]);

        for (name, missing) in [
            ("workload_identity", [TOKEN_FILE, TENANT_ID, CLIENT_ID]),
            ("client_secret", [CLIENT_SECRET, TENANT_ID, CLIENT_ID]),
        ] {
            let problem = problem(&[ACCOUNT, (CREDENTIAL, name)]);
            assert_names(&problem, &missing);
            assert_names(&problem, &[CREDENTIAL]);
        }
    }

    #[test]
    fn names_regions_and_creation_are_read() {
        let config = from(&[
            ACCOUNT,
            (DATABASE, "db"),
            (CONTAINER, "box"),
            (REGION, "West Europe, northeurope,"),
            (CREATE_IF_MISSING, "Yes"),
            (THROUGHPUT, "autoscale:4000"),
            (TOKEN_SCOPE, "https://x/.default"),
        ])
        .unwrap();
        assert_eq!((config.database(), config.container()), ("db", "box"));
        let regions: Vec<_> = config.preferred_regions().iter().map(|region| region.as_str()).collect();
        assert_eq!(regions, ["westeurope", "northeurope"]);
        assert!(config.create_if_missing());
        assert_eq!(config.throughput(), Throughput::Autoscale(4_000));
        assert_eq!(config.token_scope(), Some("https://x/.default"));
        for no in ["false", "NO", "0"] {
            let config = from(&[ACCOUNT, (CREATE_IF_MISSING, no)]).unwrap();
            assert!(!config.create_if_missing());
        }
    }

    #[test]
    fn unusable_values_are_refused_by_name() {
        for (variable, value) in [
            (REGION, ", ,"),
            (CREATE_IF_MISSING, SECRET),
            (THROUGHPUT, SECRET),
            (THROUGHPUT, "401"),
            (DATABASE, "a/b"),
            (AUTHORITY_HOST, SECRET),
        ] {
            assert_names(&problem(&[ACCOUNT, (variable, value)]), &[variable]);
        }
        assert_names(&problem(&[(ENDPOINT, SECRET)]), &[ENDPOINT]);
        assert_names(&problem(&[(ENDPOINT, "http://acc.documents.azure.com/")]), &["https"]);
    }

    #[test]
    fn the_authority_host_selects_the_cloud_if_the_endpoint_agrees() {
        let cloud = |endpoint: &str, authority: &str| {
            from(&[(ENDPOINT, endpoint), (AUTHORITY_HOST, authority)]).map(|config| config.cloud().clone())
        };
        let china = "https://login.chinacloudapi.cn/";
        let public = "https://login.microsoftonline.com/";
        assert_eq!(cloud("https://a.documents.azure.cn/", china), Ok(Cloud::China));
        assert_eq!(cloud("https://a.documents.azure.com/", public), Ok(Cloud::Public));
        assert_eq!(cloud("https://cosmos.example.org/", china), Ok(Cloud::China));
        assert_eq!(cloud("https://a.documents.azure.cn/", ""), Ok(Cloud::FromEndpoint));
        assert!(matches!(
            cloud("https://a.documents.azure.com/", "https://login.example.org"),
            Ok(Cloud::Custom { .. })
        ));
        let elsewhere = cloud("https://a.documents.azure.us/", public).unwrap_err();
        assert!(matches!(elsewhere, ConfigError::Contradiction { .. }));
        assert_names(&elsewhere.to_string(), &[ENDPOINT, AUTHORITY_HOST]);
    }

    #[test]
    fn the_example_file_names_every_variable_and_is_usable_as_it_is() {
        let example = include_str!("../../.env.example");
        let lines = example.lines().filter(|line| !line.starts_with('#'));
        let variables: Vec<_> = lines.filter_map(|line| line.split_once('=')).collect();
        for name in [
            ENDPOINT,
            KEY,
            CONNECTION_STRING,
            CREDENTIAL,
            DATABASE,
            CONTAINER,
            REGION,
            CREATE_IF_MISSING,
            THROUGHPUT,
            TENANT_ID,
            CLIENT_ID,
            CLIENT_SECRET,
            TOKEN_FILE,
            AUTHORITY_HOST,
            TOKEN_SCOPE,
        ] {
            assert!(variables.iter().any(|(listed, _)| *listed == name), "{name}");
        }
        let config = from(&variables).unwrap();
        assert_eq!(config.credential_kind(), "developer tools (az or azd)");
    }
}
