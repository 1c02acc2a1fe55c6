#!/usr/bin/env bash
# Creates the resources of main.bicep, with az commands that you can also read and paste one by one. Only main.bicep sets
# a liveness probe and a grace period. You can run the script again after a change. It turns the keys off, also on an
# existing account: other applications that use a key lose access. It cannot change the partition key of a container.
# docs/deployment.md describes the whole deployment.
#
#   ./deploy.sh <group> <account> [<image>]
#
# Requires the Azure CLI, signed in (az login), and the right to create resources and role assignments in the group.
# Variables, with their defaults:
#   LOCATION (westeurope)                region of the account and the workers
#   DATABASE, CONTAINER (duroxide)       names of database and container
#   MAX_THROUGHPUT (1000)                upper limit of autoscale in RU/s; 0 makes the account serverless
#   REPLICAS (2)                         number of workers
#   REGISTRY (none)                      login server of an Azure container registry, if the image is not public
set -euo pipefail

if [[ $# -lt 2 || $# -gt 3 ]]; then
  echo "usage: $0 <resource group> <account name> [<worker image>]" >&2
  exit 2
fi
command -v az >/dev/null || { echo "error: the Azure CLI (az) is not installed" >&2; exit 1; }

group=$1 account=$2 image=${3:-}
location=${LOCATION:-westeurope} database=${DATABASE:-duroxide} container=${CONTAINER:-duroxide}
max_throughput=${MAX_THROUGHPUT:-1000} replicas=${REPLICAS:-2} registry=${REGISTRY:-}
here=$(cd "$(dirname "$0")" && pwd)
# Cosmos DB Built-in Data Contributor reads and writes documents. It cannot create databases or containers.
data_contributor=00000000-0000-0000-0000-000000000002

az group create --name "$group" --location "$location" --output none

# One write region. With several, Cosmos DB merges conflicting writes later, and ETags protect nothing.
if ! az cosmosdb show --resource-group "$group" --name "$account" --output none 2>/dev/null; then
  capabilities=()
  if [[ $max_throughput == 0 ]]; then capabilities=(--capabilities EnableServerless); fi
  az cosmosdb create --resource-group "$group" --name "$account" \
    --locations regionName="$location" failoverPriority=0 \
    --enable-multiple-write-locations false --default-consistency-level Session \
    --backup-policy-type Continuous --continuous-tier Continuous7Days \
    ${capabilities[@]+"${capabilities[@]}"} --output none
fi

# Only Entra ID signs in: the account's keys stop working.
az resource update --resource-group "$group" --name "$account" \
  --resource-type Microsoft.DocumentDB/databaseAccounts --set properties.disableLocalAuth=true --output none

if ! az cosmosdb sql database show --resource-group "$group" --account-name "$account" --name "$database" \
  --output none 2>/dev/null; then
  az cosmosdb sql database create --resource-group "$group" --account-name "$account" --name "$database" --output none
fi

if ! az cosmosdb sql container show --resource-group "$group" --account-name "$account" --database-name "$database" \
  --name "$container" --output none 2>/dev/null; then
  throughput=()
  if [[ $max_throughput != 0 ]]; then throughput=(--max-throughput "$max_throughput"); fi
  az cosmosdb sql container create --resource-group "$group" --account-name "$account" --database-name "$database" \
    --name "$container" --partition-key-path /instanceId --partition-key-version 2 --ttl -1 \
    --idx "@$here/indexing-policy.json" ${throughput[@]+"${throughput[@]}"} --output none
else
  az cosmosdb sql container update --resource-group "$group" --account-name "$account" --database-name "$database" \
    --name "$container" --ttl -1 --idx "@$here/indexing-policy.json" --output none
fi

identity="$account-worker"
az identity create --resource-group "$group" --name "$identity" --location "$location" --output none
principal_id=$(az identity show --resource-group "$group" --name "$identity" --query principalId --output tsv)
client_id=$(az identity show --resource-group "$group" --name "$identity" --query clientId --output tsv)
identity_id=$(az identity show --resource-group "$group" --name "$identity" --query id --output tsv)

# This is a role of Cosmos DB. Azure's own roles (Owner, Contributor) do not cover documents.
assigned=$(az cosmosdb sql role assignment list --resource-group "$group" --account-name "$account" \
  --query "length([?principalId=='$principal_id' && ends_with(roleDefinitionId, '$data_contributor')])" --output tsv)
if [[ $assigned == 0 ]]; then
  az cosmosdb sql role assignment create --resource-group "$group" --account-name "$account" --scope / \
    --principal-id "$principal_id" --role-definition-id "$data_contributor" --output none
fi

endpoint=$(az cosmosdb show --resource-group "$group" --name "$account" --query documentEndpoint --output tsv)

if [[ -n $image ]]; then
  az containerapp env show --resource-group "$group" --name "$account-environment" --output none 2>/dev/null ||
    az containerapp env create --resource-group "$group" --name "$account-environment" --location "$location" \
      --output none
  pull=()
  if [[ -n $registry ]]; then pull=(--registry-server "$registry" --registry-identity "$identity_id"); fi
  az containerapp create --resource-group "$group" --name "$account-worker" --environment "$account-environment" \
    --image "$image" --user-assigned "$identity_id" ${pull[@]+"${pull[@]}"} \
    --min-replicas "$replicas" --max-replicas "$replicas" --cpu 0.5 --memory 1Gi \
    --env-vars COSMOS_ENDPOINT="$endpoint" COSMOS_CREDENTIAL=managed_identity AZURE_CLIENT_ID="$client_id" \
    COSMOS_DATABASE="$database" COSMOS_CONTAINER="$container" COSMOS_REGION="$location" \
    COSMOS_CREATE_IF_MISSING=false WORKER_GRACE_SECONDS=20 WORKER_METRICS_PORT=9090 WORKER_LOG_FORMAT=json \
    --output none
fi

echo "COSMOS_ENDPOINT=$endpoint"
echo "AZURE_CLIENT_ID=$client_id"
